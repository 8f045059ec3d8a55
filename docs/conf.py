"""The documentation site: `make docs` builds it in build/docs."""

import sys
from pathlib import Path

import hotrow

sys.path.append(str(Path(__file__).parent / "_extensions"))

project = "hotrow"
author = "the hotrow authors"
copyright = "the hotrow authors"
release = version = hotrow.__version__

extensions = [
    "mathml",
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

autodoc_typehints = "signature"
nitpicky = True

html_theme = "furo"
html_title = "hotrow"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
