"""Pictures: which files are taken, their pixels, and the folder that keeps each once, by the SHA-256 of its bytes.

Pillow is imported when the first picture is decoded, and not before.
"""
