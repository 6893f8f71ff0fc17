"""Locks that know their thread, and objects whose shared attributes may change only while their lock is held."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

MUTATORS = (
    *("append", "extend", "insert", "remove", "pop", "popleft", "clear", "update", "setdefault", "add", "discard"),
    *("__setitem__", "__delitem__", "__iadd__", "keys", "__len__", "__iter__"),
)
"""Calls of a container that need the lock; looking through it, too, since another thread may change it meanwhile."""


class OwnedLock:
    """threading.Lock, with its owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_mine = self._lock.acquire(blocking, timeout)
        if is_mine:
            self._owner = threading.get_ident()
        return is_mine

    def release(self) -> None:
        self._owner = None
        self._lock.release()

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def __enter__(self) -> "OwnedLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Guard:
    """Watches one object: what of it was changed or called with its lock, and what without."""

    def __init__(self, owner: Any, lock: str, shared: tuple[str, ...], free: tuple[str, ...] = ()) -> None:
        """`shared` attributes need the lock; `free` are calls of their containers that need none.

        A plain lock is replaced by one that knows its thread; conditions and reentrant locks know it themselves.
        """
        if isinstance(getattr(owner, lock), type(threading.Lock())):
            setattr(owner, lock, OwnedLock())
        self._lock = getattr(owner, lock)
        self._shared, self._free = shared, free
        self.held: Counter[str] = Counter()
        self.breaches: list[str] = []
        with self._lock:
            for name in shared:
                object.__setattr__(owner, name, self._guarded(name, getattr(owner, name)))
            kind = type(owner)
            set_plainly = kind.__setattr__

            def set_guarded(own: Any, name: str, value: Any) -> None:
                if name in shared:
                    self.see(name)
                    value = self._guarded(name, value)
                set_plainly(own, name, value)

            owner.__class__ = type(kind.__name__, (kind,), {"__setattr__": set_guarded})

    def see(self, name: str) -> None:
        """Something of this name happens now, in this thread."""
        if self._lock._is_owned():
            self.held[name] += 1
        else:
            self.breaches.append(f"{name} without the lock")

    def watch(self, owner: Any, *names: str) -> None:
        """Calls of another object that need the lock."""
        for name in names:
            setattr(owner, name, self._seen(name, getattr(owner, name)))

    def assert_held(self, *names: str) -> None:
        """All of these happened, each with the lock, and nothing without it."""
        assert not self.breaches, self.breaches
        assert set(names) <= set(self.held), f"{set(names) - set(self.held)} did not happen"

    def _seen(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*reported: Any, **named: Any) -> Any:
            self.see(name)
            return call(*reported, **named)

        return seen

    def _guarded(self, name: str, value: Any) -> Any:
        kind = type(value)
        if kind not in (list, dict, deque, set):
            return value

        def method(own: str) -> Callable[..., Any]:
            plain = getattr(kind, own)

            def call(container: Any, *reported: Any, **named: Any) -> Any:
                self.see(f"{name}.{own}")
                return plain(container, *reported, **named)

            return call

        methods = {own: method(own) for own in MUTATORS if hasattr(kind, own) and own not in self._free}
        methods["__bool__"] = lambda container: kind.__len__(container) > 0
        return type(kind.__name__, (kind,), methods)(value)
