#!/usr/bin/env python3
"""A link between network interfaces: what comes in at one goes out at the one it is for, later, and now and then not at all.

wire.py DELAY_MS LOSS_PERCENT INTERFACE...

As `tc netem`, which not every kernel has. Says "ready" when it forwards. An interface that goes down loses what it is sent.
"""
import heapq
import random
import selectors
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 3
SO_RCVBUFFORCE = 33
HEADER = 10  # struct virtio_net_hdr: checksums and segments are left to the interfaces

delay, loss, names = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 100, sys.argv[3:]
chance = random.Random(1)
waiting = selectors.DefaultSelector()
ends = []
for name in names:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
    end.bind((name, 0))
    end.setblocking(False)
    waiting.register(end, selectors.EVENT_READ)
    ends.append(end)

at = {}  # which interface an Ethernet address is behind
due, number = [], 0
print("ready", flush=True)
while True:
    patience = max(0, due[0][0] - time.monotonic()) if due else None
    for key, _ in waiting.select(patience):
        end = key.fileobj
        for _ in range(64):
            try:
                frame = end.recv(HEADER + 70000)
            except OSError:  # nothing more, or the interface has gone down
                break
            to, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            at[source] = end
            if chance.random() < loss:
                continue
            for other in [at[to]] if to in at else ends:
                if other is not end:
                    number += 1
                    heapq.heappush(due, (time.monotonic() + delay, number, other, frame))
    while due and due[0][0] <= time.monotonic():
        _, _, other, frame = heapq.heappop(due)
        try:
            other.send(frame)
        except OSError:
            pass
