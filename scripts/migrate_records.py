"""python -m scripts.migrate_records FOLDER...: the records of schema 2 below FOLDER/runs become records of schema 3.

Every measured value stays as it is. What schema 3 adds is computed from the configuration and the overrides; a record
gets its new id and so its new file name. Old ids and new ones are printed.
"""

import json
import sys
from pathlib import Path
from typing import Any

from macformer.harness import record as records
from macformer.harness.identity import run_id
from macformer.harness.plan import described

RENAMED = {"sessions", "schema_version", "run_id", "concurrent", "differences", "batch_size", "padding", "bucketing"}


def migrated(old: dict[str, Any], cores: int = 2) -> records.Record | records.Translation:
    """`cores`: of the machine that the runs of sweep=joblib shared."""
    concurrent = cores - 1 if "sweep=joblib" in old["overrides"] else 0
    new = old | {
        "schema_version": records.SCHEMA,
        "run_id": run_id(old["config"], old["data"]["fingerprint"]),
        "sessions": [session | {"concurrent": concurrent} for session in old["sessions"]],
        "concurrent": concurrent,
    }
    if old["kind"] == "translation":
        return records.Translation.model_validate_json(json.dumps(new))
    about = described(old["config"], old["overrides"])
    about["differences"] = about["differences"].model_dump()
    return records.Record.model_validate_json(json.dumps(new | about))


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        for file in sorted((folder / "runs").rglob("*.json")):
            old = json.loads(file.read_text())
            if old["schema_version"] != 2:
                continue
            record = migrated(old)
            records.write(record, file.with_name(f"{record.run_id}.json"))
            new = json.loads(file.with_name(f"{record.run_id}.json").read_text())
            assert {k: v for k, v in old.items() if k not in RENAMED} == {k: new[k] for k in old if k not in RENAMED}
            file.unlink()
            print(old["run_id"], record.run_id)


if __name__ == "__main__":
    main()
