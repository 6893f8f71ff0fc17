"""A process that says it is a core, sends the bytes that it was given, and then stays silent."""

import socket
import sys
import time

if __name__ == "__main__":
    data, number = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
    with socket.socket(fileno=number) as connection:
        connection.sendall(data)
        if sys.argv[-1] != "end":
            time.sleep(600)
