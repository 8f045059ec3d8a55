"""Sphinx configuration for the documentation site, which `make docs` builds in build/docs."""

import shutil
import sys
from pathlib import Path

import hotrow

HERE = Path(__file__).parent
sys.path.append(str(HERE / "_extensions"))

# Copy the lesson's notebooks from lessons/. Git ignores the copies.
for notebook in (HERE.parent / "lessons").glob("*.ipynb"):
    shutil.copy2(notebook, HERE / "tutorials")

project = "hotrow"
author = "the hotrow authors"
copyright = "the hotrow authors"
release = version = hotrow.__version__

extensions = [
    "docstrings",
    "mathml",
    "outside_links",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["README*"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"

smartquotes_action = "D"  # convert dashes, not quotes: docstrings contain code without backticks
default_role = "code"  # docstrings mark code as `name`
add_module_names = False
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_custom_sections = [("Shapes", "params_style")]
# References to torch and Python have no link targets, because the site is built offline.
nitpick_ignore_regex = [("py:.*", r"(?!hotrow\.).*"), ("py:class", r"hotrow\..*\._[A-Z]")]

html_theme = "furo"
pygments_style = "tango"  # unlike the theme's default style, this one colors diff lines
html_title = "hotrow"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
