"""The words of diagnosis and advice.

Nothing is decided here, and nothing reads what is written here.
"""
