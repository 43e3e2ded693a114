// The package in a Worker: the same calls, no page in sight.
import init, { Attention, Gpu } from "flexattn";

self.onmessage = async ({ data }) => {
  try {
    await init();
    const gpu = await Gpu.create(data.options);
    const attention = new Attention(gpu, data.attention);
    const { out } = await attention.forward(data.q, data.k, data.v);
    postMessage({ tier: gpu.tier, out: out.data }, [out.data.buffer]);
  } catch (error) {
    postMessage({ error: String(error) });
  }
};
