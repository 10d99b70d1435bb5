"""Measurements behind `esper bench`: what each part costs, against a reference in the same run."""
