"""Short ways to make documents, and outputs of tools as they print them, with made-up names and numbers."""

from __future__ import annotations

from keepstep.catalog.load import shipped
from keepstep.records.event import Event
from keepstep.sources.documents import Document, split
from keepstep.sources.parsers import Parser


def document(text: str, title: str = "", path: str = "input.log") -> Document:
    """One document of a text."""
    return split(path, text)[0]._replace(title=title, path=path)


def parsed(parser: Parser, text: str, title: str = "", path: str = "input.log") -> list[Event]:
    """The events of a text that the parser must take for its own."""
    events = parser(document(text, title, path), shipped())
    assert events is not None
    return events


def of(events: list[Event], signature: str) -> list[Event]:
    """Events of one signature."""
    return [e for e in events if e.signature == signature]


FULL = """
==============NVSMI LOG==============

Timestamp                                 : Thu Jul 10 11:12:13 2031
Driver Version                            : 570.124.06
CUDA Version                              : 12.8

Attached GPUs                             : 2
GPU 00000000:18:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    Serial Number                         : 1650124000001
    GPU UUID                              : GPU-18181818-0000-1111-2222-333333333333
    Minor Number                          : 0
    GPU Recovery Action                   : None
    PCI
        Bus Id                            : 00000000:18:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 5
                Device Current            : 5
                Device Max                : 5
                Host Max                  : 5
            Link Width
                Max                       : 16x
                Current                   : 16x
        Replays Since Reset               : 3
    Performance State                     : P0
    Clocks Event Reasons
        Idle                              : Not Active
        Applications Clocks Setting       : Not Active
        SW Power Cap                      : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Not Active
        Sync Boost                        : Not Active
        SW Thermal Slowdown               : Not Active
        Display Clock Setting             : Not Active
    FB Memory Usage
        Total                             : 81559 MiB
        Used                              : 70123 MiB
    Utilization
        GPU                               : 99 %
        Memory                            : 40 %
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : 0
            SRAM Uncorrectable SEC-DED    : 0
            DRAM Correctable              : 4
            DRAM Uncorrectable            : 0
        Aggregate
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : 0
            SRAM Uncorrectable SEC-DED    : 0
            DRAM Correctable              : 90
            DRAM Uncorrectable            : 2
            SRAM Threshold Exceeded       : No
    Retired Pages
        Single Bit ECC                    : N/A
        Double Bit ECC                    : N/A
        Pending Page Blacklist            : N/A
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 2
        Pending                           : No
        Remapping Failure Occurred        : No
        Bank Remap Availability Histogram
            Max                           : 2558 bank(s)
            High                          : 2 bank(s)
            Partial                       : 0 bank(s)
            Low                           : 0 bank(s)
            None                          : 0 bank(s)
    Temperature
        GPU Current Temp                  : 61 C
        GPU T.Limit Temp                  : 25 C
        Memory Current Temp               : 70 C
    GPU Power Readings
        Average Power Draw                : 690.10 W
        Current Power Limit               : 700.00 W
        Default Power Limit               : 700.00 W
    Module Power Readings
        Power Draw                        : 1200.00 W
        Current Power Limit               : 400.00 W
    Clocks
        Graphics                          : 1980 MHz
        SM                                : 1980 MHz
        Memory                            : 2619 MHz
    Max Clocks
        Graphics                          : 1980 MHz
        SM                                : 1980 MHz
    Fabric
        State                             : Completed
        Status                            : Success
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 4411
            Type                          : C
            Name                          : /usr/bin/python3
            Used GPU Memory               : 70000 MiB

GPU 00000000:2A:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU UUID                              : GPU-2a2a2a2a-0000-1111-2222-333333333333
    GPU Recovery Action                   : Drain and Reset
    PCI
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 3
            Link Width
                Max                       : 16x
                Current                   : 16x
    Performance State                     : P0
    Utilization
        GPU                               : 100 %
    Clocks Event Reasons
        Idle                              : Not Active
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Active
            HW Power Brake Slowdown       : Not Active
    ECC Errors
        Volatile
            SRAM Uncorrectable Parity     : 1
            SRAM Uncorrectable SEC-DED    : 2
            DRAM Uncorrectable            : 0
            SRAM Threshold Exceeded       : Yes
    Remapped Rows
        Uncorrectable Error               : 8
        Pending                           : Yes
        Remapping Failure Occurred        : Yes
        Bank Remap Availability Histogram
            None                          : 1 bank(s)
    Fabric
        State                             : In Progress
        Status                            : N/A
"""

TABLE = """
Wed May 14 10:11:12 2031
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 560.35.03              Driver Version: 560.35.03      CUDA Version: 12.6     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    0 |
| N/A   31C    P0             72W /  700W |   70123MiB /  81559MiB |    100%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:43:00.0 Off |                    3 |
| N/A   34C    P0             75W /  700W |       1MiB /  81559MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   2  NVIDIA H100 80GB HBM3          On  |   00000000:52:00.0 Off |                 ERR! |
|ERR!  ERR! ERR!             N/A /  ERR!  |      ERR!              |    ERR!         ERR! |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|=========================================================================================|
|    0   N/A  N/A      4411      C   /usr/bin/python3                            70000MiB |
+-----------------------------------------------------------------------------------------+
"""

OLD_TABLE = """
| NVIDIA-SMI 450.80.02    Driver Version: 450.80.02    CUDA Version: 11.0     |
|   0  Tesla V100-SXM2...  On   | 00000000:06:00.0 Off |                    0 |
| N/A   41C    P0    58W / 300W |  10000MiB / 32510MiB |     97%      Default |
"""

IBSTAT = """
CA 'mlx5_0'
	CA type: MT4129
	Number of ports: 1
	Firmware version: 28.39.1002
	Port 1:
		State: Active
		Physical state: LinkUp
		Rate: 400
		Base lid: 41
		Link layer: InfiniBand
CA 'mlx5_1'
	CA type: MT4129
	Number of ports: 1
	Firmware version: 28.39.1002
	Port 1:
		State: Down
		Physical state: Polling
		Rate: 10
		Base lid: 65535
		Link layer: InfiniBand
"""
