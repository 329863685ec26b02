from pathlib import Path

import pytest

from spillway_engine.ascend_versions import AscendVersions, read_ascend_versions, version_problem

DRIVER = """\
Version=25.5.0
ascendhal_version=7.35.23
aicpu_version=1.0
Innerversion=V100R001C23SPC005B219
compatible_version=[V100R001C19],[V100R001C20]
compatible_version_fw=[7.0.0,7.8.99]
package_version=25.5.0
"""
TOOLKIT = """\
package_name=Ascend-cann-toolkit
version=9.1.0
innerversion=V100R001C25SPC001B231
compatible_version=[V100R001C15],[V100R001C18]
arch=aarch64
os=linux
path=/usr/local/Ascend/ascend-toolkit/9.1.0
"""
RIGHT = AscendVersions("0.23.0.post1", "25.5.0", "9.1.0", "2.10.0.post4", "2.10.0.post4")


def distribution(folder: Path, name: str, version: str, *needs: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("place", ["aarch64-linux/ascend_toolkit_install.info", "share/info/runtime/version.info"])
def test_versions_are_read_where_the_packages_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    site, home = tmp_path / "site", tmp_path / "cann"
    site.mkdir()
    (home / place).parent.mkdir(parents=True)
    (home / place).write_text(TOOLKIT if "toolkit" in place else "Version=9.1.0\nversion_dir=9.1.0\n")
    (tmp_path / "version.info").write_text(DRIVER)
    distribution(site, "vllm-ascend", "0.23.0.post1", "numpy", "torch-npu==2.10.0.post4", "torchvision")
    distribution(site, "torch-npu", "2.10.0.post4")
    monkeypatch.syspath_prepend(str(site))

    found = read_ascend_versions({"ASCEND_HOME_PATH": str(home)}, tmp_path / "version.info", ())

    assert found == RIGHT
    assert version_problem(found) is None


def test_on_a_machine_without_any_of_it_nothing_is_found_or_needed(tmp_path: Path) -> None:
    found = read_ascend_versions({}, tmp_path / "version.info", (tmp_path,))

    assert found == AscendVersions(None, None, None, None, None)
    assert version_problem(found) is None


def test_a_file_without_a_version_is_none_at_all(tmp_path: Path) -> None:
    (tmp_path / "version.info").write_bytes(b"\xff\x00 compatible_version=[9]\nInnerversion=V1\n")

    assert read_ascend_versions({}, tmp_path / "version.info", ()).driver is None


@pytest.mark.parametrize(
    ("driver", "cann", "torch_npu", "remedy"),
    [
        (
            "25.0.3",
            "9.1.0",
            "2.10.0.post4",
            "; upgrade the node's driver, or choose other nodes by engine.nodeSelector",
        ),
        ("24.1.rc3.7", "9.1.0", "2.10.0.post4", "; upgrade the node's driver"),
        ("25.5.0", "8.5.1", "2.10.0.post4", "; use an image with that CANN, without another one mounted over it"),
        ("25.5.0", "9.1.0", "2.9.0", "; use an image with that torch_npu"),
        (None, "9.1.0", "2.10.0.post4", "; bring /usr/local/Ascend/driver/version.info into the container"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    driver: str | None, cann: str | None, torch_npu: str | None, remedy: str
) -> None:
    problem = version_problem(AscendVersions("0.23.0", driver, cann, torch_npu, "2.10.0.post4")) or ""

    assert problem.startswith("vllm-ascend 0.23.0 needs driver 25.")
    assert "CANN 9.1, torch_npu 2.10.0.post4, and here are" in problem
    assert f"driver {driver or 'not found'}, CANN {cann}, torch_npu {torch_npu}" in problem
    assert remedy in problem and "\n" not in problem


@pytest.mark.parametrize(
    "found",
    [
        AscendVersions("0.23.0", "26.0.RC1", "9.1.1", "2.10.0.post4+cpu", "2.10.0.post4"),
        AscendVersions("0.23.0", "25.2.0", None, None, "2.10.0.post4"),  # what cannot be found contradicts nothing
        AscendVersions("0.40.0", "27.0.0", "11.0.0", "3.0.0", None),  # nothing is known of these
        AscendVersions(None, "23.0.0", "8.0.0", "2.1.0", None),  # another image, without vllm-ascend
    ],
)
def test_what_fits_or_is_unknown_is_no_problem(found: AscendVersions) -> None:
    assert version_problem(found) is None
