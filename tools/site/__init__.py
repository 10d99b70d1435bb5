"""The documentation site: `make docs`, or `python -m tools.site`.

The pages under docs/ stay what they are, plain Markdown that reads well without a site. Around the
generator stand four steps of our own, none of which needs its interfaces:

* `pages`: docs/ and what it links to outside of docs/, as one tree that links only to itself;
* `terms`: the first use of every word of the glossary on a page leads to it;
* `pictures`: SVG images become part of their page, so that they follow its light and dark;
* `check`: no broken link is left, and nothing is loaded from anywhere else.
"""
