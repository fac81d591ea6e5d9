"""What pytest should not import: integrations whose package is not installed (`make test-integrations` installs it).

Nor the pretended device, which torch keeps once it has it: a process that has a device cannot fork and differentiate.
"""

from importlib.util import find_spec

collect_ignore = [
    f"src/sordino/integrations/{name}.py"
    for name in ("accelerate", "lightning", "transformers", "trl")
    if find_spec(name) is None
]
collect_ignore += ["tests/devices/pretend.py", "tests/devices/walk.py"]
