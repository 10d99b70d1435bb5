from esper.leyline.slots import NUM_BLUEPRINTS
from esper.tamiyo.policy.layout import BASE_FEATURES, FEEDBACK_FEATURES, SLOT_FEATURES
from esper.tamiyo.policy.observation import TravellingLayout
from tools.pages.observation import render, render_travelling


def test_every_feature_has_its_line() -> None:
    page = render()
    for index, spec in enumerate((*BASE_FEATURES, *FEEDBACK_FEATURES)):
        assert f"| {index} | `{spec.name}` | {spec.formula} |" in page
    for index, spec in enumerate(SLOT_FEATURES):
        assert f"| {index} | `{spec.name}` | {spec.formula} |" in page
        assert f"| `{spec.name}` | {31 + index} | {61 + index} | {91 + index} |" in page


def test_every_travelling_feature_has_its_line() -> None:
    page = render_travelling()
    for name in ("travelling", "ratios"):
        for part in TravellingLayout(3, NUM_BLUEPRINTS, name).parts:
            for index, spec in enumerate(part.specs):
                assert f"| {index} | `{spec.name}` | {spec.formula} |" in page
