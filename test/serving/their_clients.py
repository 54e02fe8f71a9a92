# SPDX-License-Identifier: Apache-2.0
"""Run with an environment that has openpi-client and json-numpy, and none of this package: asks a server as they do.

python their_clients.py PORT FRAMES.npz ANSWERS.npz TOKEN
"""

import sys

import json_numpy
import numpy as np
import requests
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def main() -> None:
    port, frames, answers, token = sys.argv[1:]
    given = np.load(frames)
    policy = WebsocketClientPolicy("127.0.0.1", int(port), api_key=token or None)
    metadata = policy.get_server_metadata()
    assert metadata["cameras"] == ["image"] and metadata["action_horizon"] == 1, metadata
    prompt = str(given["instruction"])
    found: dict[str, list[np.ndarray]] = {"openpi": [], "openvla": [], "encoded": []}
    json_numpy.patch()  # as OpenVLA's deploy script asks of its clients
    url, headers = f"http://127.0.0.1:{port}/act", {"Authorization": f"Bearer {token}"}
    for image in given["images"]:
        # The names of openpi's LIBERO example; this policy has one camera and reads no state.
        seen = {"observation/image": image, "observation/wrist_image": image, "observation/state": np.zeros(8)}
        found["openpi"].append(policy.infer({**seen, "prompt": prompt})["actions"])
        asked = {"image": image, "instruction": prompt, "unnorm_key": "bridge_orig"}
        found["openvla"].append(requests.post(url, json=asked, headers=headers, timeout=60).json())
        once_more = {"encoded": json_numpy.dumps(asked)}
        answer = requests.post(url, json=once_more, headers=headers, timeout=60).json()
        found["encoded"].append(json_numpy.loads(answer))
    np.savez(answers, openpi=found["openpi"], openvla=found["openvla"], encoded=found["encoded"])


main()
