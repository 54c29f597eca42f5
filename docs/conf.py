"""How the documentation becomes a site: ``make docs``. Pages are Markdown; the reference comes from docstrings."""

import sys
from pathlib import Path

from gaff.version import __version__

sys.path.insert(0, str(Path(__file__).resolve().parent))  # made_pages

project, author, release = "gaff", "the gaff authors", __version__
copyright = "the gaff authors, Apache-2.0"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "made_pages",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]
nb_execution_mode = "cache"  # a notebook that has changed is run
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_cache_path = str(Path(__file__).resolve().parent / "_build" / "notebooks")
nb_output_stderr = "remove"
nb_merge_streams = True
python_maximum_signature_line_length = 90
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
python_use_unqualified_type_names = True
napoleon_use_ivar = True
copybutton_exclude = ".linenos, .gp, .go"
html_theme = "pydata_sphinx_theme"
html_title = "gaff"
html_static_path = ["_static"]
html_css_files = ["gaff.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "gaff"},
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
html_sidebars = {"index": []}
