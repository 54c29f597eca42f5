"""What was found, drawn: a record, trace or anatomy as text, SVG, HTML page or figure.

A view is a function from plain rows (``gaff.record``) to text or a picture. It knows nothing of models, hooks or torch,
so a record that was made elsewhere can be shown where torch is not installed. Colours, widths and words are decided
here; what the numbers mean is decided where the rows are declared.
"""
