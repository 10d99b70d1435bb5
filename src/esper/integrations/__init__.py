"""Growth in the training loops of other libraries: `lightning` and `transformers`.

Each module needs its own extra and is imported by name: `esper.integrations.lightning`.
"""
