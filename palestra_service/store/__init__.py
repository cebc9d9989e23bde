"""The control store: its tables, and the operations on them that `ControlStore` runs one at a time."""
