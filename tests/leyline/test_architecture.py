from __future__ import annotations

import json

from esper.leyline.architecture import ModuleRecord


def test_a_record_comes_back_from_plain_data() -> None:
    for shape in ((4, 8, 8), (), None):
        record = ModuleRecord(
            path="blocks.0", kind="Sequential", parameters=44, shape=shape, slots=("r0c0",)
        )
        assert ModuleRecord.from_mapping(json.loads(json.dumps(record.to_mapping()))) == record
