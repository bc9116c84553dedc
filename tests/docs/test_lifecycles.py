"""docs/proxies.md says of each of vLLM's lifecycle tests what our test of them says, which
needs vLLM and is read here as text."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_CASES = 20
ROWS = re.findall(
    r"^\| (?:prefill|decode): `(\w+)`(?:, (\d) cases)? \| (yes|no|refused) \| (.*?) ?\|$",
    (ROOT / "docs" / "proxies.md").read_text(),
    re.MULTILINE,
)
MORE = set(re.findall(r"`(\w+)` beside them", (ROOT / "docs" / "proxies.md").read_text()))
TREE = ast.parse((ROOT / "tests" / "real_vllm" / "test_lifecycles.py").read_text())


def cases(answer):
    """How many cases of which test the page says so of."""
    return Counter({f"test_{name}": int(num or 1) for name, num, said, _ in ROWS if said == answer})


def listed(name):
    """The same by a set of the test's."""
    (found,) = (
        ast.literal_eval(node.value)
        for node in TREE.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return Counter(case.partition("[")[0] for case in found)


def test_the_table_has_what_passes_and_what_is_refused():
    assert cases("yes") == listed("PASS")
    assert cases("refused") == listed("REFUSED")
    assert sum(int(num or 1) for _, num, _, _ in ROWS) == NUM_CASES


def test_each_case_that_we_do_not_promise_has_its_sister_and_each_sister_its_case():
    vllms, *sisters = (
        node
        for node in TREE.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )
    assert vllms.name == "test_of_vllms_own_tests_those_of_the_host_pass"
    words = {
        sister.name.removeprefix("test_"): {
            node.value for node in ast.walk(sister) if isinstance(node, ast.Constant)
        }
        for sister in sisters
    }
    named = [
        re.fullmatch(r"`(\w+)(?:\[(.+)\])?`", sister) for _, _, said, sister in ROWS if said == "no"
    ]
    assert {each[1] for each in named} | MORE == set(words)
    for each in named:
        assert each[2] is None or each[2] in words[each[1]], each[0]
