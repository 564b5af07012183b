"""PEP 517/660 backend: setuptools', plus what the kernels need where kernels are going to be built.

pip asks for it before it builds, in an environment that holds setuptools alone. Without kernels nothing is
added.
"""

from __future__ import annotations

import sys

import htree_cuda_build as build
from setuptools import build_meta as _setuptools
from setuptools.build_meta import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)


def _kernel_requirements() -> list[str]:
    try:
        the_plan = build.plan()
    except build.BuildError as error:
        sys.exit(f"htree_cuda: {error}")
    return build.requirements(the_plan)


def get_requires_for_build_wheel(config_settings=None):
    """setuptools' requirements and the kernels'."""
    return [*_setuptools.get_requires_for_build_wheel(config_settings), *_kernel_requirements()]


def get_requires_for_build_editable(config_settings=None):
    """setuptools' requirements and the kernels'."""
    return [*_setuptools.get_requires_for_build_editable(config_settings), *_kernel_requirements()]
