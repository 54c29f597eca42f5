"""What is opened and left: captures, edits, extractors; what was asked of them and what they did.

From the question to the answer: ``request`` and ``plan`` hold what is asked and check it against a model
(``plan_files`` saves it); ``capture``, ``edit`` and ``take`` open an engine session with one stream for each site
(``kept_site``, ``edited_site``), which the engine calls when something passes; ``exact`` decides how a value is kept,
``budget`` how much; ``checked_edit`` sees that what an edit returned fits, ``edit_size`` tells how much it changed,
``same_run`` brings patches what passed another site;
``reading`` finds kept values and ``readable`` has the verbs by which they are read, ``receipt`` tells what happened;
``saved_values`` and ``capture_files`` write a capture to disk, ``saved_capture`` reads it.
"""
