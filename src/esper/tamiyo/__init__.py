"""Tamiyo is the controller: once per epoch it reads every host's signals and decides what to grow.

Every controller is known by a name ('wait', 'random', 'heuristic', 'schedule:FILE') or, where it
was learned, by the folder it was saved in; `make_controller` turns either into one.
"""
