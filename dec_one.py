import sys,torch
from htree_cuda import TreeCache, forward_cached
B,T,H,Hk,tk=map(int,sys.argv[1:6])
g=torch.Generator(device="cuda").manual_seed(0)
c=TreeCache(B,T+32,Hk,128,dtype=torch.bfloat16,device="cuda")
step=max(4096,262144//B)
for f in range(0,T,step):
    sh=(B,min(step,T-f),Hk,128)
    c.append(torch.randn(sh,generator=g,device="cuda",dtype=torch.bfloat16),torch.randn(sh,generator=g,device="cuda",dtype=torch.bfloat16))
q=torch.randn(B,1,H,128,generator=g,device="cuda",dtype=torch.bfloat16)
for _ in range(3): forward_cached(q,c,top_k_per_layer=tk)
torch.cuda.synchronize()
