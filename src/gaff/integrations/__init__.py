"""Ways out of a record and into other tools, one file a partner; each partner is imported only when it is asked for.

``rows`` reads a record as plain rows, once or on from where one stopped; ``tables`` writes them to files;
``tensorboard``, ``mlflow``, ``wandb`` and ``trackio`` send them to a tracker, by the ``Sender`` of ``partners``. These
need no torch. ``lightning`` and ``transformers`` go the other way: callbacks that watch a run of their trainers.
"""
