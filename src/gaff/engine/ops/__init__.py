"""Functional calls inside a module's own forward: seen by a function mode, and handled as small modules.

``mode`` sees them and finds the call that they belong to, ``calls`` does what is asked at one of them, ``names`` says
what they are called.
"""
