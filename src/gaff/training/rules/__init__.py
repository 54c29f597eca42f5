"""What is wrong with a training: one rule a symptom, and the judge that asks them."""
