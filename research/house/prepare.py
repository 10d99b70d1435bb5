"""Two edits before the moves, in the current checkout: controller_fingerprint and one Objective."""
# ruff: noqa

from pathlib import Path

p = Path("src/esper/kasmina/training.py")
s = p.read_text()
s = (
    s.replace(
        'Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]\n"""Maps (outputs, targets) to (loss [B], correct [B] in 0 to 1, or None)."""\n',
        "",
    )
    .replace(
        "from torch.nn import functional as F\n",
        "from torch.nn import functional as F\n\nfrom esper.kasmina.evaluation import Objective\n",
    )
    .replace("from collections.abc import Callable\n", "")
)
p.write_text(s)
import re

w = Path("src/esper/nissa/recorded.py")
s = w.read_text()
a = s.index("def controller_fingerprint")
b = s.index("def describe_versions")
f = s[a:b]
s = s[:a] + s[b:]
s = (
    s.replace("from esper.tamiyo.controllers.policy_file import find_policy\n", "")
    .replace("import hashlib\n", "")
    .replace("from esper.utils.files import read_regular\n", "")
    .replace("from esper.utils.manifest import MANIFEST_FILE\n", "")
)
w.write_text(s)
p = Path("src/esper/tamiyo/controllers/policy_file.py")
s = p.read_text().rstrip() + "\n\n\n" + f.rstrip() + "\n"
s = s.replace(
    "from __future__ import annotations\n",
    "from __future__ import annotations\n\nimport hashlib\nfrom esper.utils.files import read_regular\nfrom esper.utils.manifest import MANIFEST_FILE\n",
    1,
)
p.write_text(s)
for q in [*Path("src").rglob("*.py"), *Path("tests").rglob("*.py")]:
    s = q.read_text()
    if "controller_fingerprint" in s and q.name != "policy_file.py":
        s = s.replace(
            "from esper.nissa.recorded import World, controller_fingerprint",
            "from esper.nissa.recorded import World\nfrom esper.tamiyo.controllers.policy_file import controller_fingerprint",
        )
        s = re.sub(
            r"from esper\.runs\.world import controller_fingerprint\b",
            "from esper.tamiyo.controllers.policy_file import controller_fingerprint",
            s,
        )
        q.write_text(s)
        print(
            "LOOK"
            if "world import" in s
            and "controller_fingerprint" in s.split("world import")[1].split("\n")[0]
            else "ok",
            q,
        )
q = Path("tests/nissa/test_recorded_world.py")
s = q.read_text()
s = s.replace("    controller_fingerprint,\n", "", 1).replace(
    "from esper.nissa.recorded import (",
    "from esper.tamiyo.controllers.policy_file import controller_fingerprint\nfrom esper.nissa.recorded import (",
    1,
)
q.write_text(s)
