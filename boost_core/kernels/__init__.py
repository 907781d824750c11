"""One folder per operation: ``naive`` is the reference, ``triton`` the kernel; the folder dispatches by device."""
