// Numbers that browsers have in their global scope and TypeScript's library does not declare.
declare const GPUBufferUsage: { readonly STORAGE: number; readonly UNIFORM: number; readonly COPY_DST: number };
declare const GPUShaderStage: { readonly COMPUTE: number };
