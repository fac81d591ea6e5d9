"""What pytest should not import: integrations whose package is not installed (`make test-integrations` installs it)."""

from importlib.util import find_spec

collect_ignore = [
    f"src/sordino/integrations/{name}.py"
    for name in ("accelerate", "lightning", "transformers", "trl")
    if find_spec(name) is None
]
