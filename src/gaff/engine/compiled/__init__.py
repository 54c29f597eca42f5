"""Sessions inside compiled graphs: hooks that Dynamo traces, and ops by which a graph tells what passes."""
