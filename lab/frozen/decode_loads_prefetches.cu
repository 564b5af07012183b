// As it ran on 2026-11-27: nvcc -O3 -std=c++17 -arch=sm_90a -cudart static. Blocks of 4 KB from anywhere: cycles that prefetches of all
// blocks take to issue, and cycles of the loads so many cycles later.
#include <cstdio>
#include <cstdint>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <cuda_runtime.h>
#define CK(x) do{auto e=(x); if(e){printf("%s %s\n",#x,cudaGetErrorString(e));exit(1);}}while(0)
constexpr int kBlock=4096;
// PF 0 none, 1 bulk prefetch, 2 prefetch.global.L2 a line a lane, 3 the same with evict_last, 4 every second line
template<int PF>
__global__ void __launch_bounds__(512,1) k(char const* __restrict__ src,uint32_t const* __restrict__ list,int per,int delay,uint32_t*out,uint32_t*clk){
  extern __shared__ __align__(1024) char sm[];
  int w=threadIdx.x/32,l=threadIdx.x%32;
  list+=blockIdx.x*per;
  uint32_t s=0;
  long long t0=clock64();
  for(int i=w;i<per;i+=16){
    char const*p=src+(size_t)list[i]*kBlock;
    if(PF==1&&l==0) asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;"::"l"(p),"r"(kBlock));
    if(PF==2) asm volatile("prefetch.global.L2 [%0];"::"l"(p+l*128));
    if(PF==3) asm volatile("prefetch.global.L2::evict_last [%0];"::"l"(p+l*128));
    if(PF==4&&l<16) asm volatile("prefetch.global.L2 [%0];"::"l"(p+l*256));
  }
  __syncthreads();
  long long t1=clock64();
  while(clock64()-t1<delay);
  __syncthreads();
  long long t2=clock64();
    uint4 x[8],y[8];
    auto ld=[&](uint4*r,int i){ if(i<per){char const*p=src+(size_t)list[i]*kBlock+l/4*256+l%4*16;
      #pragma unroll
      for(int n=0;n<8;++n) r[n]=__ldg((uint4 const*)(p+(n/4)*2048+(n%4)*64)); } };
    ld(x,w);
    for(int i=w;i<per;i+=32){
      ld(y,i+16);
      #pragma unroll
      for(int n=0;n<8;++n) s+=x[n].x^x[n].y^x[n].z^x[n].w;
      ld(x,i+32);
      if(i+16<per)
      #pragma unroll
      for(int n=0;n<8;++n) s+=y[n].x^y[n].y^y[n].z^y[n].w;
    }
  __syncthreads();
  long long t3=clock64();
  if(threadIdx.x==0){clk[blockIdx.x*2]=t1-t0;clk[blockIdx.x*2+1]=t3-t2;}
  if(s==0x12345678) out[0]=s;
}
template<int PF> void run(char const*name,char*src,uint32_t*list,int ctas,int per,int delay,uint32_t*out,uint32_t*clk){
  int smem=120*1024;
  CK(cudaFuncSetAttribute(k<PF>,cudaFuncAttributeMaxDynamicSharedMemorySize,smem));
  cudaEvent_t a,b;cudaEventCreate(&a);cudaEventCreate(&b);
  std::vector<float> t;std::vector<double> c0,c1;
  for(int r=0;r<24;++r){
    uint32_t*li=list+(size_t)r*132*256;
    cudaEventRecord(a);
    k<PF><<<ctas,512,smem>>>(src,li,per,delay,out,clk);
    cudaEventRecord(b);CK(cudaEventSynchronize(b));float ms;cudaEventElapsedTime(&ms,a,b);t.push_back(ms);
    std::vector<uint32_t> h(ctas*2);cudaMemcpy(h.data(),clk,ctas*8,cudaMemcpyDeviceToHost);
    double x=0,y=0;for(int i=0;i<ctas;++i){x+=h[2*i];y+=h[2*i+1];} c0.push_back(x/ctas);c1.push_back(y/ctas);
  }
  std::sort(t.begin(),t.end());std::sort(c0.begin(),c0.end());std::sort(c1.begin(),c1.end());
  printf("%-8s ctas %3d per %3d delay %5d: %7.2f us  prefetch %6.0f clk  loads %6.0f clk %5.1f B/clk\n",name,ctas,per,delay,t[12]*1e3,c0[12],c1[12],per*4096/c1[12]);
}
int main(){
  size_t bytes=(size_t)572<<20; size_t blocks=bytes/kBlock; char*src;CK(cudaMalloc(&src,bytes));CK(cudaMemset(src,1,bytes));
  std::vector<uint32_t> h((size_t)24*132*256); srand(1); for(auto&x:h) x=((uint64_t)rand()*32768+rand())%blocks;
  uint32_t*list,*out,*clk;CK(cudaMalloc(&list,h.size()*4));CK(cudaMalloc(&out,4));CK(cudaMalloc(&clk,4096));CK(cudaMemcpy(list,h.data(),h.size()*4,cudaMemcpyHostToDevice));
  for(int ctas:{64,132}) for(int per:{16,64,128}) for(int delay:{0,4000,8000,16000,32000}){
    run<0>("none",src,list,ctas,per,delay,out,clk);
    run<1>("bulk",src,list,ctas,per,delay,out,clk);
    run<2>("line",src,list,ctas,per,delay,out,clk);
    run<3>("last",src,list,ctas,per,delay,out,clk);
    run<4>("half",src,list,ctas,per,delay,out,clk);
  }
}
