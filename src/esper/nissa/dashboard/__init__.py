"""The live page: what runs are doing, in a browser, read from their stores and never written to.

`esper dashboard` starts it. `app` answers requests, `guard` decides who may ask and knows which
runs there are, `episodes` asks the stores, and `stream` tells an open page what is new. What is
drawn is declared in `esper.nissa.report.panels`, for the report as well. Everything a browser needs
lies in `static` and `templates`; nothing comes from outside.
"""
