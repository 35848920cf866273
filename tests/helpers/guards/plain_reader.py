"""A GPU to read from, for back ends that set clocks their own way; it refuses to be set itself."""

from envpipe_megatron.gpu.base import ClockState, EnergyReading, Gpu, GpuAddress
from envpipe_megatron.gpu.registry import Device

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
CLOCKS_MHZ = (1410, 1395, 1380, 1200, 210)


class PlainReader(Gpu):
    drives_hardware = False
    name = "plain"
    supported_frequencies_mhz = CLOCKS_MHZ
    power_w = 250.0

    def __init__(self, uid=UUID, pci_bus_id="0000:1b:00.0"):
        self.address = GpuAddress("nvml", uid)
        self.pci_bus_id = pci_bus_id

    def _lock(self, frequency_mhz):
        raise AssertionError("a reader's own clock control was used")

    def _reset(self):
        raise AssertionError("a reader's own clock control was used")

    def device(self):
        return Device("nvml", 3, self.address.uid, self.name, self.pci_bus_id)

    def clock_state(self):
        return ClockState(None, 1395, ("power cap",))

    def read_energy(self):
        return EnergyReading(12.5, 3.0)

    def time_s(self):
        return 4.0


def assert_reads_through(gpu):
    assert gpu.name == "plain"
    assert gpu.supported_frequencies_mhz == CLOCKS_MHZ
    assert (gpu.power_w, gpu.time_s()) == (250.0, 4.0)
    assert gpu.read_energy() == EnergyReading(12.5, 3.0)
    assert gpu.clock_state() == ClockState(None, 1395, ("power cap",))
