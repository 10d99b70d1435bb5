from __future__ import annotations

from esper.lab.tasks import get_family
from tools.pages.arena import render


def test_every_claim_member_is_on_the_page() -> None:
    page = render()
    for member in get_family("image16_family").members("claim"):
        assert f"| {member.label} |" in page
