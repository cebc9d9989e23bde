"""Pictures: accepted file types, pixels, and a content-addressed folder.

Pillow is imported when the first picture is decoded.
"""
