"""Growth in the training loops of other libraries: `lightning`, `hugging_face`, `transformers`.

Each module needs its own extra and is imported by name: `esper.integrations.lightning`.
"""
