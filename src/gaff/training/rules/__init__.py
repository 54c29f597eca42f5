"""What is wrong with a training: one rule a symptom, and the judge that asks them.

``registry`` says what a rule is; ``steps`` and ``values`` hold those of gaff; ``judge`` asks them about each look and
makes findings of what they hit. Everything here works on plain numbers (``gaff.record.sample``): there is no tensor and
no model, so a rule can be tried on samples that are written down by hand.
"""
