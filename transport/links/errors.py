"""Why a process cannot join its instance."""


class LinkError(RuntimeError):
    """The daemon or the router did not answer in time: the next process may have better luck."""


class LinkRefusedError(LinkError):
    """The daemon refused this process, as it would refuse the next one."""


class RouterRefusedError(LinkRefusedError):
    """The router refused this process."""
