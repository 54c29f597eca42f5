"""Pages: one HTML file that works offline, or is served live on this machine. Needs numpy (``gaff[page]``); no torch.

``run``, ``trace`` and ``diff`` say what a page carries, as a ``Document`` of a JSON head and ``Chunks`` of arrays;
``document`` makes the file; ``live`` serves the same of a run that goes on. The script that draws it all is written in
TypeScript, in ``page/`` at the top of the repository; ``assets`` holds what is built of it.
"""
