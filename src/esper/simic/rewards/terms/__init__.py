"""The terms rewards are made of: functions from a `StepView` to what each row is paid.

A term is in the file of its subject, with its constants and the update that keeps its part of the
memory; its tests are in the file of the same name.
"""
