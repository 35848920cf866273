"""Stands here so that tests of every folder can import what they share."""

from fake_nvml.fixtures import fake_nvml, fake_nvml_library, fake_nvml_node

__all__ = ["fake_nvml", "fake_nvml_library", "fake_nvml_node"]
