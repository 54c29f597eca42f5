"""Functional calls inside a module's own forward: seen by a function mode, and handled as small modules."""
