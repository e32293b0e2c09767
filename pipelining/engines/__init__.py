"""The engines behind one protocol: who runs the train step, and how it is spread over devices."""
