"""The live page: what runs are doing, in a browser, read from their stores and never written to.

`esper dashboard` starts it. `app` answers requests, `guard` decides who may ask, `catalog` knows
which runs there are, `panels` says what is drawn, `reading` and `episodes` ask the stores, and
`stream` tells an open page what is new. Everything a browser needs lies in `static` and
`templates`; nothing comes from outside.
"""
