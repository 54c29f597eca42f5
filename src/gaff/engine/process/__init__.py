"""Seen for the whole process: optimizer steps, outermost calls, the models that a script trains.

``optimizer`` stands around optimizers' steps, ``calls`` around models, backward passes and steps that nobody names,
``models`` finds the models of a script. All of it is taken away when the last who asked has gone.
"""
