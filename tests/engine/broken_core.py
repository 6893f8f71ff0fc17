"""A process that says it is a core, sends the bytes that it was given, and then only listens."""

import socket
import sys

if __name__ == "__main__":
    data, number = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
    with socket.socket(fileno=number) as connection:
        connection.sendall(data)
        while connection.recv(2**16):
            pass
