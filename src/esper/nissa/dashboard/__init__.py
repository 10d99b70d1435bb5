"""The live page: shows runs in a browser, read-only, from their stores.

`esper dashboard` starts it. `app` answers requests, `guard` controls access and lists the runs,
`episodes` queries the stores, and `stream` sends new rows to an open page.
`esper.nissa.report.panels` declares the charts, for the report as well. Everything that a browser
needs is in `static` and `templates`; nothing is loaded from elsewhere.
"""
