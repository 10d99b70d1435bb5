"""What a run survives, counted: hostile inputs, kills, full disks, vanishing folders, two writers.

`python -m tests.harness` runs everything in full numbers and prints the counts; the tests run the
same trials in small numbers. A fault is a traceback, a hang, a crash, a number that is lost, or one
that is another than without the accident.
"""
