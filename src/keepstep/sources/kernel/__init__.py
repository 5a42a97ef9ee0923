"""The kernel's log, as it is written: records of /dev/kmsg, the journal, or `dmesg --follow`."""
