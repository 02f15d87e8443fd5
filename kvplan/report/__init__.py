"""Results as people read them: rich tables on stdout, a module for each command. No figure is computed here.

Names from traces and configs are printed as literal text, never as markup or control codes.
"""
