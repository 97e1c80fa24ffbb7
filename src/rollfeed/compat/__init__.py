"""Things that people bring along from other frameworks: their plug-ins, their flags and their file formats.

A layer between the parts, which know nothing of it, and ``app``, which asks it what a setting of others means.
"""
