"""Sessions inside compiled graphs: hooks that Dynamo compiles, and ops by which a graph tells what passes.

``session`` decides whether the taps of a session can be there, ``hooks`` and ``edits`` are what Dynamo puts into the
graph, ``tell`` is how the graph speaks to Python as it runs, ``structure`` how it tells nested values.
"""
