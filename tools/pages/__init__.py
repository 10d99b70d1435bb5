"""Pages of the documentation that are made from the code: `make pages`, `python -m tools.pages`."""
